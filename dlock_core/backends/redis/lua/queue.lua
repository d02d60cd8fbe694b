-- queue.lua: the waiters of a lock, included by the scripts that grant or end a lease.
-- Expects `lock`, `tokens` (the counter) and `index` (the set of held locks): their keys.
-- All keys of a lock carry its hash tag, so they live in one slot, and so do `wake` and the keys that begin with it:
-- the lists that waiters listen to, each its own (named by its holder) or one for all waiters of an event loop (by the
-- listener).
-- A waiter is alive for as long as its entry says, and for as long as its listener is.
-- A lock with a queue is in the set of held locks, so that a hand-over need not add it.
-- CLAIM: ms within which a hand-over must be confirmed. LINGER: ms that a queue stays without a request of a waiter.
-- Numbers in commands are text where possible: Redis formats a Lua number as slowly as it runs a command.
--#include tokens.lua
--#include held_locks.lua
local LINGER = 10000
local CLAIM, queue, entries, sharers, owners = '2000', lock .. ':q', lock .. ':w', lock .. ':s', lock .. ':o'
local wake = string.sub(tokens, 1, -6) .. 'wake:'
local time = redis.call('TIME')
local moment = micros(time)
local now = math.floor(moment / 1000)

-- A lease that is granted anew, with a token above its floor, is marked as restore.lua does: the undo of its first
-- attempt may still be in flight.
local function grant(holder, mode, owner, ttl, floor)
  local token, text = draw(moment, floor + 1, 1)
  text = holder .. '|' .. text .. '|' .. (floor + 0 > 0 and '0' or '') .. time[1] .. '|' .. owner
  if mode == 'x' then
    redis.call('SET', lock, text, 'PX', ttl)
  else
    redis.call('ZADD', sharers, now + ttl, holder)
    redis.call('HSET', owners, holder, text)
    local longest = math.max(ttl, redis.call('PTTL', lock))
    redis.call('SET', lock, 'shared', 'PX', longest)
    redis.call('PEXPIRE', sharers, longest)
    redis.call('PEXPIRE', owners, longest)
  end
  tidy(token)
  return token
end

-- Hand the lock over to the first waiters that are alive, as many as may hold it together, and wake each. The grant
-- lasts for CLAIM only: the waiter confirms it, which starts its full ttl, or else the next one is served. The caller of
-- the script is not woken: it has the reply. `value`: what the key of the lock holds, nothing if that has just ended;
-- `head`: the first waiter, if the script knows it already. Returns whether the lock is held now.
local function serve(value, caller, head)
  while not value or value == 'shared' do
    head = head or redis.call('ZRANGE', queue, '0', '0')[1]
    if not head then return value end
    local entry = redis.call('HGET', entries, head) or ''
    local alive, mode, ttl, floor, listener, owner = string.match(entry, '^(%d+)|(%a)|(%d+)|(%d+)|(%x*)|(.*)$')
    local list = wake .. (listener == '' and head or listener or '')
    local lives = alive and (alive + 0 >= now or redis.call('EXISTS', list .. ':alive') == 1)
    if lives and value and mode == 'x' then return value end
    redis.call('ZREM', queue, head)
    redis.call('HDEL', entries, head)
    if lives then
      -- First, so that a user without this permission has handed over nothing when the script fails.
      if head ~= caller then
        redis.call('RPUSH', list, head .. '|' .. ttl .. '|' .. lock)
        redis.call('PEXPIRE', list, CLAIM)
      end
      if mode == 's' and not value then redis.call('DEL', lock) end
      grant(head, mode, owner, ttl + 0 < CLAIM + 0 and ttl or CLAIM, floor)
      value = mode == 'x' and 'taken' or 'shared'
    end
    head = nil
  end
  return value
end
