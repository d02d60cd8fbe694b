-- held.lua: list the locks that are held, or were a minute ago, since waiters may still be queued for them; reads only.
-- KEYS  list of held locks
-- reply the keys of these locks
return redis.call('ZRANGEBYSCORE', KEYS[1], redis.call('TIME')[1] * 1000 - 60000, '+inf')
