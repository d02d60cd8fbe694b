-- drop.lua: end our exclusive lease, and nothing else; for a slot whose other keys are being moved to another node.
-- KEYS  lock
-- ARGV  holder
-- reply 1 it was ours | 0 the lock is free | 2 another holder has it
--#include read.lua
local head = read('GETRANGE', KEYS[1], 0, 32)
if head == ARGV[1] .. '|' then return redis.call('DEL', KEYS[1]) end
return head == '' and 0 or 2
