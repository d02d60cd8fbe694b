-- renew.lua: push the expiry of many leases that are still ours; never re-creates one.
-- KEYS  list of held locks, then one lock per lease
-- ARGV  for each lease: holder, ttl ms
-- reply for each lease: 1 renewed | 0 gone
local time, answers = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 60000)
for i = 2, #KEYS do
  local lock, holder, ttl = KEYS[i], ARGV[2 * i - 3], tonumber(ARGV[2 * i - 2])
  local head, ours = redis.pcall('GETRANGE', lock, 0, 32), 0
  if head == holder .. '|' then
    ours = redis.call('PEXPIRE', lock, ttl)
  elseif head == 'shared' and (tonumber(redis.call('ZSCORE', lock .. ':s', holder)) or 0) > now then
    ours = redis.call('ZADD', lock .. ':s', 'CH', now + ttl, holder) and 1
    for _, key in ipairs({lock, lock .. ':s', lock .. ':o'}) do
      redis.call('PEXPIRE', key, math.max(ttl, redis.call('PTTL', key)))
    end
  end
  if ours == 1 then redis.call('ZADD', KEYS[1], 'XX', 'GT', now + ttl, lock) end
  answers[i - 1] = ours
end
return answers
