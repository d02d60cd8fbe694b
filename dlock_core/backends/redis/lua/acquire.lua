-- acquire.lua: take the lock, or a position in its queue; idempotent by holder.
-- KEYS  lock, token counter, set of held locks
-- ARGV  holder, ttl ms, mode x|s, owner, ms for which a waiter keeps its position (0: take none), floor, barge 0|1
--       [, smallest new token (Redlock's forecast)[, listener that a hand-over wakes instead of the holder]]
-- reply token (granted, for the whole ttl) | {ms until it makes sense to try again, owner} (busy)
local lock, tokens, index = KEYS[1], KEYS[2], KEYS[3]
local holder, ttl, mode = ARGV[1], ARGV[2], ARGV[3]
--#include tokens.lua
--#include held_locks.lua

-- The usual case, a free lock without waiters, needs none of the functions below, unless a listener's list may
-- tell of an earlier hand-over to us.
local list = ARGV[9] and string.sub(tokens, 1, -6) .. 'wake:' .. ARGV[9] or lock
if mode == 'x' and redis.call('EXISTS', lock, lock .. ':q', list) == 0 then
  local at = redis.call('TIME')
  local token, text = draw(micros(at), math.max(ARGV[6] + 1, ARGV[8] or 0), 1)
  local since = ARGV[6] == '0' and at[1] or '0' .. at[1]
  redis.call('SET', lock, holder .. '|' .. text .. '|' .. since .. '|' .. ARGV[4], 'PX', ttl)
  redis.call('SADD', index, lock)
  tidy(token)
  return token
end
--#include queue.lua
local value, token = redis.pcall('GET', lock)
if type(value) == 'table' then
  if not string.find(value.err, 'WRONGTYPE') then return value end
  return {math.max(redis.call('PTTL', lock), 100), 'a key of another type'}
end

-- Take off the list what tells of a hand-over to us. It has come to nothing, or is found now; a listener that read of it
-- later would take it for news, and give back a lease that we hold.
local function take_notice()
  if ARGV[9] then
    redis.call('LREM', list, 0, holder .. '|' .. ttl .. '|' .. lock)
  else
    redis.call('DEL', wake .. holder)
  end
end

-- The token of our own grant, if there is one: an earlier attempt was granted and its reply lost, or a release has
-- handed the lock over to us.
local function mine(text)
  if text == 'shared' then
    text = redis.call('ZSCORE', sharers, holder) and redis.call('HGET', owners, holder)
  end
  if not text or string.sub(text, 1, 33) ~= holder .. '|' then return nil end
  take_notice()
  return string.match(text, '^%x+|(%d+)|') + 0
end

-- Start the full ttl of our own grant, and never shorten it: this may come late, after a renewal for longer. A caller
-- that needs a token above its floor is granted the lock anew.
local function confirm(token)
  local floor = tonumber(ARGV[6])
  ttl = math.max(ttl, mode == 'x' and redis.call('PTTL', lock) or redis.call('ZSCORE', sharers, holder) - now)
  if token <= floor then
    redis.call('ZREM', sharers, holder)
    return grant(holder, mode, ARGV[4], ttl, floor)
  end
  if mode == 'x' then
    redis.call('PEXPIRE', lock, ttl)
  else
    redis.call('ZADD', sharers, now + ttl, holder)
    for _, key in ipairs({lock, sharers, owners}) do
      redis.call('PEXPIRE', key, math.max(ttl, redis.call('PTTL', key)))
    end
  end
  return token
end

if value == 'shared' then
  --#include shared.lua
  prune()
  value = redis.call('GET', lock)
end
token = mine(value)
local waits = ARGV[5] ~= '0' or not value or value == 'shared'
-- Even a single try of a lock that may be free queues for a moment: so the queue alone decides who is next.
if not token and waits then
  local listener, arrival = ARGV[9] or '', '0'
  if ARGV[7] ~= '1' then
    arrival = moment
    local last = tonumber(redis.call('ZRANGE', queue, '-1', '-1', 'WITHSCORES')[2]) or 0
    if last >= arrival + 0 then arrival = last + 1 end  -- last in the queue even if the clock was set back
  end
  redis.call('ZADD', queue, 'NX', arrival, holder)
  local alive = string.format('%.0f', now + math.max(ARGV[5], 1))
  local entry = alive .. '|' .. mode .. '|' .. ttl .. '|' .. ARGV[6] .. '|' .. listener .. '|' .. ARGV[4]
  redis.call('HSET', entries, holder, entry)
  take_notice()
  local linger = listener == '' and LINGER or 6 * LINGER  -- a listener looks after one waiter after the other
  if redis.call('PTTL', queue) < linger * 0.8 then
    redis.call('PEXPIRE', queue, linger)
    redis.call('PEXPIRE', entries, linger)
  end
  if not value or value == 'shared' then
    redis.call('SADD', index, lock)
    serve(value, holder)
    value = redis.call('GET', lock)
    token = mine(value)
  end
end
if token then return confirm(token) end
if ARGV[5] == '0' and waits then
  redis.call('ZREM', queue, holder)
  redis.call('HDEL', entries, holder)
  serve(value)
  value = redis.call('GET', lock)
end
local left, ours = redis.call('PTTL', lock), value and (value == 'shared' or string.match(value, '^%x+|%d+|%d+|'))
if not ours and ARGV[5] ~= '0' then redis.call('SADD', index, lock) end
if value == 'shared' then
  left = tonumber(redis.call('ZRANGE', sharers, 0, 0, 'WITHSCORES')[2]) - now
  value = redis.call('HGET', owners, redis.call('ZRANGE', sharers, 0, 0)[1])
end
-- Another program may have taken away our expiry, or set another one: then it means nothing.
return {ours and left >= 0 and left < 1e15 and left + 1 or 100, value or ''}
