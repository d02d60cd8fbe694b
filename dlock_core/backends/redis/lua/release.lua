-- release.lua: end our lease and hand the lock to the first live waiter, in one step; idempotent by holder.
-- KEYS  lock, token counter[, list of held locks]
-- ARGV  holder, wake-up prefix
-- reply 1 it was ours | 0 nobody has it | 2 another has it
local lock, tokens, index, holder, wake = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
local value = redis.pcall('GET', lock)
local shared = value == 'shared'
if not value then return 0 end
if type(value) == 'table' then return 2 end
if shared then
  local at, expiry = redis.call('TIME'), tonumber(redis.call('ZSCORE', lock .. ':s', holder))
  if not expiry or expiry <= at[1] * 1000 + math.floor(at[2] / 1000) then return 2 end
  redis.call('ZREM', lock .. ':s', holder)
  redis.call('HDEL', lock .. ':o', holder)
  shared = redis.call('EXISTS', lock .. ':s') == 1
elseif string.sub(value, 1, 33) ~= holder .. '|' then
  return 2
end
if not shared then
  redis.call('DEL', lock)
  if index then redis.call('ZREM', index, lock) end
end
if redis.call('EXISTS', lock .. ':q') == 0 then return 1 end
--#include queue.lua
if shared then prune() end
serve()
return 1
