-- restore.lua: write leases to a node that lost or never had them, while a majority of other nodes keeps them.
-- KEYS  token counter, set of held locks, then one lock per lease
-- ARGV  for each lease: holder, ttl ms, token, owner
-- reply the number of leases that were written; leases of others stay unchanged
-- The time since when begins with a zero, so that the undo of an attempt, which may come later, leaves the lease alone.
local tokens, time, taken = KEYS[1], redis.call('TIME'), 0
local clock = time[1] * 1000000 + time[2]
--#include tokens.lua
--#include read.lua
for i = 3, #KEYS do
  local holder, ttl, token, owner = unpack(ARGV, 4 * i - 11, 4 * i - 8)
  local text = holder .. '|' .. token .. '|0' .. time[1] .. '|' .. owner
  local value = read('GET', KEYS[i])
  local known = type(value) == 'string' and string.sub(value, 1, 33) == holder .. '|'
  local marked = known and string.match(value, '^(%d+)|0', 34)
  if marked and tonumber(marked) > tonumber(token) then  -- It was granted with a floor, and this comes late.
    taken = taken + 1
  elseif redis.call('SET', KEYS[i], text, unpack(known and {'KEEPTTL'} or {'NX', 'PX', ttl})) then
    if counted(read('GET', tokens), clock) < tonumber(token) then redis.call('SET', tokens, token) end
    redis.call('SADD', KEYS[2], KEYS[i])
    taken = taken + 1
  end
end
return taken
