-- adopt.lua: write the token that a majority of nodes is to have to our exclusive grant; no counter goes back.
-- KEYS  lock, token counter
-- ARGV  holder, token
-- reply this server's clock in us (adopted) | 0 (the grant is gone)
--#include read.lua
local tokens, value = KEYS[2], read('GET', KEYS[1])
if type(value) ~= 'string' or string.sub(value, 1, 33) ~= ARGV[1] .. '|' then return 0 end
local drawn, rest = string.match(value, '^%x+|(%d+)|(.*)$')
local token, at = tonumber(ARGV[2]), redis.call('TIME')
local clock = at[1] * 1000000 + at[2]
--#include tokens.lua
if tonumber(drawn) < token then
  redis.call('SET', KEYS[1], ARGV[1] .. '|' .. ARGV[2] .. '|' .. rest, 'KEEPTTL')
end
if counted(read('GET', tokens), clock) < token then redis.call('SET', tokens, ARGV[2]) end
return clock
