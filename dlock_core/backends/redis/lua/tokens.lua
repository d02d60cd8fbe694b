-- tokens.lua: the counter that tokens are drawn from, included by the scripts that draw them.
-- Expects `tokens` (its key). A value that no clock will show within ten years, or that is no number, does not count:
-- the next token replaces it, so that a spoiled key heals.
local function counted(now)  -- now: the server's clock in us
  local counter = tonumber(redis.pcall('GET', tokens))
  return counter and counter >= 0 and counter < now + 315576000000000 and math.floor(counter) or 0
end
