-- claim.lua: start the full ttl of an exclusive grant that was handed over to one waiter;
-- never shortens one, because it may come late.
-- KEYS  lock
-- ARGV  holder, ttl ms
-- reply token | nil it was not handed over
local value = redis.pcall('GET', KEYS[1])
local holder, token = string.match(type(value) == 'string' and value or '', '^(%x+)|(%d+)|')
if holder ~= ARGV[1] then return false end
redis.call('PEXPIRE', KEYS[1], math.max(ARGV[2], redis.call('PTTL', KEYS[1])))
return token + 0
