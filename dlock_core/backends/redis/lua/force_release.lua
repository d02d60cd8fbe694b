-- force_release.lua: end the grant with this token, and no newer one; the next waiter is served.
-- KEYS  lock, token counter, set of held locks
-- ARGV  token
-- reply 1 ended | 0 there is no such grant
local lock, tokens, index, token = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
--#include queue.lua
--#include read.lua
local function has(text) return type(text) == 'string' and string.match(text, '^%x+|(%d+)|') == token end
local value, found = read('GET', lock), 0
if value == 'shared' then
  --#include shared.lua
  for _, holder in ipairs(redis.call('ZRANGE', sharers, 0, -1)) do
    if has(redis.call('HGET', owners, holder)) then found = unshare(holder) end
  end
  prune()
  value = redis.call('GET', lock)
elseif has(value) then
  found = redis.call('DEL', lock)
  value = nil
end
if not serve(value) then redis.call('SREM', index, lock) end
return found
