-- confirm.lua: confirm every grant that was handed over to the waiters of one listener, and check some of them.
-- KEYS  wake-up list, token counter, set of held locks[, any others], then the locks of the waiters to check
-- ARGV  ms for which the listener and its waiters count as alive, ms that a queue stays without a request of a waiter,
--       then the holder of each of these waiters
-- reply {{{holder, token, lock}, ...}, {for each waiter: ms until it makes sense to try again, ...}}
local wake, confirmed, left, at = KEYS[1], {}, {}, redis.call('TIME')
local now = at[1] * 1000 + math.floor(at[2] / 1000)
redis.call('SET', wake .. ':alive', 1, 'PX', ARGV[1])
for _, item in ipairs(redis.call('LRANGE', wake, 0, -1)) do
  local holder, ttl, lock = string.match(item, '^(%x+)|(%d+)|(.*)$')
  local value, sharers, owners = redis.pcall('GET', lock), lock .. ':s', lock .. ':o'
  local shared, expiry = value == 'shared', now + ttl
  if shared then value = redis.call('ZSCORE', sharers, holder) and redis.call('HGET', owners, holder) end
  if type(value) == 'string' and string.sub(value, 1, 33) == holder .. '|' then
    if shared then redis.call('ZADD', sharers, 'GT', expiry, holder) end
    for _, key in ipairs(shared and {lock, sharers, owners} or {lock}) do
      if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
    end
    confirmed[#confirmed + 1] = {holder, tonumber(string.match(value, '^%x+|(%d+)|')), lock}
  end
end
redis.call('DEL', wake)
for i = 3, #ARGV do
  local lock, holder, ms = KEYS[#KEYS - #ARGV + i], ARGV[i], 0
  local value, queue, entries = redis.pcall('GETRANGE', lock, 0, 32), lock .. ':q', lock .. ':w'
  -- A waiter without a position, for a lock that is free or another library's, tries again by itself.
  if redis.call('ZSCORE', queue, holder) and redis.call('HGET', entries, holder) then
    redis.call('PEXPIRE', queue, ARGV[2])
    redis.call('PEXPIRE', entries, ARGV[2])
    if value == 'shared' then
      ms = (tonumber(redis.call('ZRANGE', lock .. ':s', 0, 0, 'WITHSCORES')[2]) or now) - now
    elseif type(value) == 'string' and string.match(value, '^%x+|$') then
      ms = redis.call('PTTL', lock)
    end
  end
  left[i - 2] = math.max(ms, 0)
end
return {confirmed, left}
