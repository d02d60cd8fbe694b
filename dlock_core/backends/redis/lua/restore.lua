-- restore.lua: take leases at a node that forgot or never had them, while a majority of other nodes keeps them.
-- KEYS  token counter, list of held locks, then one lock per lease
-- ARGV  for each lease: holder, ttl ms, token, owner
-- reply the number of leases that were taken; what is not free stays as it is
local time, taken = redis.call('TIME'), 0
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #KEYS do
  local holder, ttl, token, owner = unpack(ARGV, 4 * i - 11, 4 * i - 8)
  if redis.call('SET', KEYS[i], holder .. '|' .. token .. '|' .. time[1] .. '|' .. owner, 'NX', 'PX', ttl) then
    if (tonumber(redis.call('GET', KEYS[1])) or 0) < tonumber(token) then redis.call('SET', KEYS[1], token) end
    redis.call('ZADD', KEYS[2], now + ttl, KEYS[i])
    taken = taken + 1
  end
end
return taken
