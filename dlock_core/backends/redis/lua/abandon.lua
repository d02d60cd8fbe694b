-- abandon.lua: leave the queue and undo a grant that may have happened; idempotent by holder.
-- KEYS  lock, token counter, set of held locks
-- ARGV  holder
-- reply 1 there was something to undo | 0 nothing
local lock, tokens, index, holder = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
--#include queue.lua
local found = redis.call('ZREM', queue, holder) + redis.call('DEL', wake .. holder)
redis.call('HDEL', entries, holder)
local value = redis.pcall('GET', lock)
if value == 'shared' then
  found = found + unshare(holder)
  prune()
elseif type(value) == 'string' and string.sub(value, 1, 33) == holder .. '|' then
  found = found + redis.call('DEL', lock)
end
if redis.call('EXISTS', lock) == 0 then redis.call('SREM', index, lock) end
serve()
return math.min(found, 1)
