-- release_many.lua: end those of our exclusive leases that have no waiters.
-- KEYS  set of held locks, then the locks
-- ARGV  the holders run together (32 characters each)
-- reply for each lock: 1 it was ours and is free | 0 it is unchanged: use release.lua
local index, answers = KEYS[1], {}
for first = 2, #KEYS, 1000 do
  local last, queues, ended = math.min(first + 999, #KEYS), {}, {}
  local values = redis.call('MGET', unpack(KEYS, first, last))
  for i = first, last do queues[#queues + 1] = KEYS[i] .. ':q' end
  local waited_for = redis.call('EXISTS', unpack(queues)) > 0
  for i = first, last do
    local value, holder = values[i - first + 1], string.sub(ARGV[1], 32 * i - 63, 32 * i - 32)
    local is_ours = value and string.find(value, holder .. '|', 1, true) == 1
    if is_ours and not (waited_for and redis.call('EXISTS', queues[i - first + 1]) == 1) then
      ended[#ended + 1] = KEYS[i]
      answers[i - 1] = 1
    else
      answers[i - 1] = 0
    end
  end
  if #ended > 0 then
    redis.call('DEL', unpack(ended))
    redis.call('SREM', index, unpack(ended))
  end
end
return answers
