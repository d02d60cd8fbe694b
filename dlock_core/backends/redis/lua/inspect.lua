-- inspect.lua: show who holds and who waits for some locks; reads only.
-- KEYS  locks
-- ARGV  what the keys of wake-up lists begin with
-- reply for each lock: {value, ms left, {sharer, expiry ms, text, ...}, {waiter, arrival us, entry, ...}, server's ms}
local time, answers, none = redis.call('TIME'), {}, {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_text = string.format('%.0f', now)

local function sharers_of(lock)
  local found, live = {}, redis.call('ZRANGEBYSCORE', lock .. ':s', now, '+inf', 'WITHSCORES')
  for j = 1, #live, 2 do
    found[#found + 1] = {live[j], live[j + 1], redis.call('HGET', lock .. ':o', live[j]) or ''}
  end
  return found
end

local function waiters_of(lock)
  local found, queued = {}, redis.call('ZRANGE', lock .. ':q', 0, -1, 'WITHSCORES')
  for j = 1, #queued, 2 do
    local entry = redis.call('HGET', lock .. ':w', queued[j]) or ''
    local alive, listener = string.match(entry, '^(%d+)|%a|%d+|%d+|(%x*)|')
    if alive and (tonumber(alive) >= now or redis.call('EXISTS', ARGV[1] .. listener .. ':alive') == 1) then
      found[#found + 1] = {queued[j], queued[j + 1], entry}
    end
  end
  return found
end

for first = 1, #KEYS, 1000 do
  local last = math.min(first + 999, #KEYS)
  local values, queues = redis.call('MGET', unpack(KEYS, first, last)), {}
  for i = first, last do queues[i - first + 1] = KEYS[i] .. ':q' end
  local queued = redis.call('EXISTS', unpack(queues)) > 0
  for i = first, last do
    local lock, value = KEYS[i], values[i - first + 1]
    if not value then value = redis.call('EXISTS', lock) == 1 and 'a key of another type' or '' end
    local sharers, waiters = value == 'shared' and sharers_of(lock) or none, queued and waiters_of(lock) or none
    answers[i] = {value, redis.call('PTTL', lock), sharers, waiters, now_text}
  end
end
return answers
