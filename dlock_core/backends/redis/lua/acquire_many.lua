-- acquire_many.lua: take several free locks exclusively, all or none; takes no position in any queue.
-- KEYS  token counter, list of held locks, then the locks
-- ARGV  owner, then for each lock: holder, ttl ms
-- reply {token, token, ...} all granted | {} none
local tokens, index, drawn, at = KEYS[1], KEYS[2], {}, redis.call('TIME')
local clock = at[1] * 1000000 + at[2]
--#include tokens.lua
for i = 3, #KEYS do
  local mine = redis.pcall('GETRANGE', KEYS[i], 0, 32) == ARGV[2 * i - 4] .. '|'
  if not mine and (redis.call('EXISTS', KEYS[i], KEYS[i] .. ':q') > 0) then return {} end
end
local token = math.max(counted(clock) + 1, clock)
if token % 64 < #KEYS then redis.call('ZREMRANGEBYSCORE', index, '-inf', at[1] * 1000 - 60000) end
for i = 3, #KEYS do
  local holder, ttl, text = ARGV[2 * i - 4], tonumber(ARGV[2 * i - 3]), string.format('%.0f', token)
  redis.call('SET', KEYS[i], holder .. '|' .. text .. '|' .. at[1] .. '|' .. ARGV[1], 'PX', ttl)
  redis.call('ZADD', index, at[1] * 1000 + ttl, KEYS[i])
  drawn[i - 2] = token
  token = token + 1
end
redis.call('SET', tokens, string.format('%.0f', token))
return drawn
