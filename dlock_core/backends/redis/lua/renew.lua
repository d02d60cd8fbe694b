-- renew.lua: push the expiry of many leases that are still ours; never re-creates one.
-- KEYS  [any others,] [list of held locks,] then one lock per lease
-- ARGV  for each lease: holder, ttl ms
-- reply for each lease: 1 renewed | 0 gone
local time, answers, before = redis.call('TIME'), {}, #KEYS - #ARGV / 2
local now, index = time[1] * 1000 + math.floor(time[2] / 1000), KEYS[before]
if index then redis.call('ZREMRANGEBYSCORE', index, '-inf', now - 60000) end
for i = 1, #ARGV / 2 do
  local lock, holder, ttl = KEYS[before + i], ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  local head, ours = redis.pcall('GETRANGE', lock, 0, 32), 0
  if head == holder .. '|' then
    ours = redis.call('PEXPIRE', lock, ttl)
  elseif head == 'shared' and (tonumber(redis.call('ZSCORE', lock .. ':s', holder)) or 0) > now then
    ours = redis.call('ZADD', lock .. ':s', 'CH', now + ttl, holder) and 1
    for _, key in ipairs({lock, lock .. ':s', lock .. ':o'}) do
      redis.call('PEXPIRE', key, math.max(ttl, redis.call('PTTL', key)))
    end
  end
  if index and ours == 1 then redis.call('ZADD', index, 'XX', 'GT', now + ttl, lock) end
  answers[i] = ours
end
return answers
