-- release.lua: end our lease and hand the lock to the first live waiter, in one step; idempotent by holder.
-- KEYS  lock, token counter, set of held locks
-- ARGV  holder[, 1 to leave the queue as well]
-- reply 1 it was ours | 0 the lock is free | 2 another holder has it
local lock, tokens, index, holder = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local value, found, head = redis.pcall('GETRANGE', lock, '0', '32'), 1, nil
if ARGV[2] and redis.call('ZREM', lock .. ':q', holder) == 1 then redis.call('HDEL', lock .. ':w', holder) end
if value == '' then return 0 end
-- Any error but that of a key of another type, such as a missing permission, says nothing about the lock.
if type(value) == 'table' then return string.find(value.err, 'WRONGTYPE') and 2 or value end
if value == holder .. '|' then
  value, head = nil, redis.pcall('ZRANGE', lock .. ':q', '0', '0')[1]  -- none in a key of another type
  if not head then
    redis.call('DEL', lock)
    redis.call('SREM', index, lock)
    return 1
  end
elseif value ~= 'shared' then
  return 2
end
--#include queue.lua
if value then
  --#include shared.lua
  prune()
  if unshare(holder) == 0 then found = 2 * redis.call('EXISTS', lock) end
  value = redis.call('GET', lock)
end
if not serve(value, nil, head) then
  redis.call('DEL', lock)
  redis.call('SREM', index, lock)
end
return found
