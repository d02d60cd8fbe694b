-- shared.lua: end shared grants, included by the scripts that end a lease, where it is a shared one.
-- Expects `lock`, and what queue.lua defines.

local function unshare(holder)
  local found = redis.call('ZREM', sharers, holder)
  redis.call('HDEL', owners, holder)
  if redis.call('EXISTS', sharers) == 0 then redis.call('DEL', lock, owners) end
  return found
end

-- End the shared grants whose ttl is over: only the longest of them is the ttl of the key.
local function prune()
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', sharers, '-inf', now)) do unshare(gone) end
  if redis.call('EXISTS', sharers) == 0 then redis.call('DEL', lock, owners) end
end
