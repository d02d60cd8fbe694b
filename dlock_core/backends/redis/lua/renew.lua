-- renew.lua: extend the expiry of many leases that are still ours; never re-creates one, and never shortens one: it may
-- come late, after another that was answered. Only where the clock is behind the grant is the expiry overwritten.
-- KEYS  one lock per lease[, any others]
-- ARGV  the leases' holders, run together (32 characters each), then ttl ms: one for all, or one for each
-- reply for each lease: 1 renewed | 0 gone, also if the key has another type: the others are renewed
local answers, clock = {}, nil
local function now()
  clock = clock or redis.call('TIME')
  return clock[1] * 1000 + math.floor(clock[2] / 1000)
end
-- Whether the clock has been set back since the lease was granted.
local function is_ahead(text)
  return (tonumber(string.match(text, '^%x+|%d+|(%d+)|')) or 0) * 1000 > now()
end
for i = 1, #ARGV[1] / 32 do
  local lock, holder, ttl = KEYS[i], string.sub(ARGV[1], 32 * i - 31, 32 * i), ARGV[i + 1] or ARGV[2]
  -- One short answer a lock costs less than one MGET: Lua would keep a copy of every owner's text.
  local value, ours = redis.pcall('GETRANGE', lock, '0', '31'), 0
  if value == holder then
    local left = redis.call('PTTL', lock)
    if left > tonumber(ttl) and not is_ahead(redis.call('GET', lock)) then ttl = left end
    ours = redis.call('PEXPIRE', lock, ttl)  -- a write in any case: replicas are asked about it
  elseif value == 'shared' and (tonumber(redis.pcall('ZSCORE', lock .. ':s', holder)) or 0) > now() then
    for _, key in ipairs({lock, lock .. ':s', lock .. ':o'}) do
      redis.call('PEXPIRE', key, math.max(ttl, redis.call('PTTL', key)))
    end
    -- Only now: a server without memory refuses this, unless the script has written before.
    local text = redis.call('HGET', lock .. ':o', holder)
    ours = redis.call('ZADD', lock .. ':s', text and is_ahead(text) and 'XX' or 'GT', now() + ttl, holder) and 1
  elseif type(value) == 'table' and not string.find(value.err, 'WRONGTYPE') then
    return value
  end
  answers[i] = ours
end
return answers
