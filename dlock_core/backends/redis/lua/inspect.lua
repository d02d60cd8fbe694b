-- inspect.lua: return the holders and waiters of some locks; reads only.
-- KEYS  locks, a thousand at most
-- ARGV  the prefix of the keys of wake-up lists
-- reply {server's ms, {value, ...}, {ms left, ...}, and for each lock that several hold or wait for:
--   {its number, {{sharer, expiry ms, text}, ...}, {{waiter, arrival us, entry}, ...}}, ...}
local time, none = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)

--#include read.lua

-- A key of another type shows nothing: it must not hide the other locks.
local function field(key, name)
  local found = read('HGET', key, name)
  return type(found) == 'string' and found or ''
end

local function sharers_of(lock)
  local found, live = {}, read('ZRANGEBYSCORE', lock .. ':s', now, '+inf', 'WITHSCORES')
  for j = 1, #live, 2 do
    found[#found + 1] = {live[j], live[j + 1], field(lock .. ':o', live[j])}
  end
  return found
end

local function waiters_of(lock)
  local found, queued = {}, read('ZRANGE', lock .. ':q', 0, -1, 'WITHSCORES')
  for j = 1, #queued, 2 do
    local entry = field(lock .. ':w', queued[j])
    local alive, listener = string.match(entry, '^(%d+)|%a|%d+|%d+|(%x*)|')
    if alive and (tonumber(alive) >= now or redis.call('EXISTS', ARGV[1] .. listener .. ':alive') == 1) then
      found[#found + 1] = {queued[j], queued[j + 1], entry}
    end
  end
  return found
end

local call, values, lefts, queues = redis.call, redis.call('MGET', unpack(KEYS)), {}, {}
for i, lock in ipairs(KEYS) do queues[i] = lock .. ':q' end
local answers, queued = {string.format('%.0f', now), values, lefts}, redis.call('EXISTS', unpack(queues)) > 0
for i, lock in ipairs(KEYS) do
  local value = values[i]
  lefts[i] = call('PTTL', lock)
  if not value then values[i] = call('EXISTS', lock) == 1 and 'a key of another type' or '' end
  if queued or value == 'shared' then
    local sharers, waiters = value == 'shared' and sharers_of(lock) or none, queued and waiters_of(lock) or none
    if #sharers + #waiters > 0 then answers[#answers + 1] = {i, sharers, waiters} end
  end
end
return answers
