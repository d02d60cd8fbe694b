-- read.lua: read a key that may be of another type, included by scripts that then ignore it.
-- Returns the reply, a table with `err` for a key of another type. Any other error, such as a missing permission, says
-- nothing about the key, and is the script's.
local function read(...)
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err and not string.find(found.err, 'WRONGTYPE') then error(found.err) end
  return found
end
