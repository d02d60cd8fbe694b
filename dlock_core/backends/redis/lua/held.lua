-- held.lua: list the locks that are held, or were a minute ago, for their waiters may not have asked again; reads only.
-- KEYS  list of held locks
-- reply the keys of these locks
return redis.call('ZRANGEBYSCORE', KEYS[1], redis.call('TIME')[1] * 1000 - 60000, '+inf')
