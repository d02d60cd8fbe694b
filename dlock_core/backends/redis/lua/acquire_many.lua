-- acquire_many.lua: take several free locks exclusively, all or none; takes no position in any queue.
-- KEYS  token counter, set of held locks, then the locks
-- ARGV  owner, the holders run together (32 characters each), then ttl ms: one for all, or one for each
-- reply {token, token, ...} all granted | {} none
local tokens, index, granted, at = KEYS[1], KEYS[2], {}, redis.call('TIME')
--#include tokens.lua
--#include held_locks.lua
--#include read.lua
local function holder(i) return string.sub(ARGV[2], 32 * i - 95, 32 * i - 64) end

-- Usually none of the keys exists. If something is, it must be our own grant, whose reply was lost. It keeps its
-- token, and a ttl that a renewal has made longer since, if this comes late.
for first = 3, #KEYS, 1000 do
  local last, found = math.min(first + 999, #KEYS), {unpack(KEYS, first, math.min(first + 999, #KEYS))}
  for i = first, last do found[#found + 1] = KEYS[i] .. ':q' end
  for i = first, redis.call('EXISTS', unpack(found)) > 0 and last or 0 do
    local value = read('GET', KEYS[i])
    local token = type(value) == 'string' and string.match(value, '^' .. holder(i) .. '|(%d+)|')
    if not token and redis.call('EXISTS', KEYS[i], KEYS[i] .. ':q') > 0 then return {} end
    granted[i - 2] = tonumber(token)
  end
end

local token = draw(micros(at), 0, #KEYS - 2)
for i = 3, #KEYS do
  local ttl = ARGV[i] or ARGV[3]
  if granted[i - 2] then
    redis.call('PEXPIRE', KEYS[i], math.max(ttl, redis.call('PTTL', KEYS[i])))
  else
    granted[i - 2] = token + i - 3
    local text = string.format('|%.0f|', token + i - 3) .. at[1] .. '|' .. ARGV[1]
    redis.call('SET', KEYS[i], holder(i) .. text, 'PX', ttl)
  end
end
for first = 3, #KEYS, 1000 do
  redis.call('SADD', index, unpack(KEYS, first, math.min(first + 999, #KEYS)))
end
tidy(token)
return granted
