-- abandon.lua: leave the queue and undo a grant that may have happened; idempotent by holder.
-- KEYS  lock, token counter, set of held locks
-- ARGV  holder[, 1 to leave alone what restore.lua has written, or was granted with a floor]
-- reply 1 there was something to undo | 0 nothing
local lock, tokens, index, holder = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
--#include queue.lua
local found = redis.call('ZREM', queue, holder) + redis.call('DEL', wake .. holder)
redis.call('HDEL', entries, holder)
local value = redis.pcall('GET', lock)
if value == 'shared' then
  --#include shared.lua
  found = found + unshare(holder)
  prune()
  value = redis.call('GET', lock)
elseif type(value) == 'string' and string.sub(value, 1, 33) == holder .. '|'
    and not (ARGV[2] and string.find(value, '^%d+|0', 34)) then
  found = found + redis.call('DEL', lock)
  value = nil
end
if not serve(value) then redis.call('SREM', index, lock) end
return math.min(found, 1)
