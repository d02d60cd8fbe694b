-- acquire_many.lua: take several free locks exclusively, all or none; takes no place in any queue.
-- KEYS  token counter, list of held locks, then the locks
-- ARGV  owner, then for each lock: holder, ttl ms
-- reply {token, token, ...} all granted | {} none
local at, tokens = redis.call('TIME'), {}
local now = at[1] * 1000 + math.floor(at[2] / 1000)
for i = 3, #KEYS do
  local mine = redis.pcall('GETRANGE', KEYS[i], 0, 32) == ARGV[2 * i - 4] .. '|'
  if not mine and (redis.call('EXISTS', KEYS[i], KEYS[i] .. ':q') > 0) then return {} end
end
local token = math.max((tonumber(redis.call('GET', KEYS[1])) or 0) + 1, at[1] * 1000000 + at[2])
for i = 3, #KEYS do
  local holder, ttl, text = ARGV[2 * i - 4], tonumber(ARGV[2 * i - 3]), string.format('%.0f', token)
  redis.call('SET', KEYS[i], holder .. '|' .. text .. '|' .. at[1] .. '|' .. ARGV[1], 'PX', ttl)
  redis.call('ZADD', KEYS[2], now + ttl, KEYS[i])
  tokens[i - 2] = token
  token = token + 1
end
redis.call('SET', KEYS[1], string.format('%.0f', token))
return tokens
