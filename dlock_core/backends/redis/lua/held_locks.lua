-- held_locks.lua: the set of the locks that are held or waited for, included by the scripts that change it.
-- Expects `index` (its key). Every such lock is in it. A lock that is released leaves it; one that runs out stays until
-- it is cleaned up, and listings do not show it.

-- Remove locks that are neither held nor waited for: a few, and more as long as there are some. One draw in 64 does it.
local function tidy(token)
  if token % 64 ~= 0 then return end
  local cursor = string.format('%.0f', token / 64)
  for _ = 1, 32 do
    local found, over = redis.call('SSCAN', index, cursor, 'COUNT', 16), 0
    for _, key in ipairs(found[2]) do
      if redis.call('EXISTS', key, key .. ':q') == 0 then over = over + redis.call('SREM', index, key) end
    end
    cursor = found[1]
    if over == 0 or cursor == '0' then return end
  end
end
