-- held.lua: list the locks that are held or waited for, and some that have run out; reads only. For Redlock.
-- KEYS  set of held locks
-- reply the keys of these locks
return redis.call('SMEMBERS', KEYS[1])
