-- inspect.lua: show who holds and who waits for some locks; reads only.
-- KEYS  locks
-- reply for each lock: {value, ms left, {sharer, expiry ms, text, ...}, {waiter, arrival us, entry, ...}, server's ms}
local time, answers = redis.call('TIME'), {}
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i, lock in ipairs(KEYS) do
  local value, sharers, waiters = redis.pcall('GETRANGE', lock, 0, -1), {}, {}
  if type(value) == 'table' then value = 'a key of another type' end
  if value == 'shared' then
    local live = redis.call('ZRANGEBYSCORE', lock .. ':s', now, '+inf', 'WITHSCORES')
    for j = 1, #live, 2 do
      sharers[#sharers + 1] = {live[j], live[j + 1], redis.call('HGET', lock .. ':o', live[j]) or ''}
    end
  end
  local queued = redis.call('ZRANGE', lock .. ':q', 0, -1, 'WITHSCORES')
  for j = 1, #queued, 2 do
    local entry = redis.call('HGET', lock .. ':w', queued[j]) or ''
    local alive = tonumber(string.match(entry, '^(%d+)|'))
    if alive and alive >= now then waiters[#waiters + 1] = {queued[j], queued[j + 1], entry} end
  end
  answers[i] = {value, redis.call('PTTL', lock), sharers, waiters, string.format('%.0f', now)}
end
return answers
