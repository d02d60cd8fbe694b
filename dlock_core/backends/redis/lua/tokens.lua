-- tokens.lua: draw tokens, included by the scripts that grant. Expects `tokens` (the key of the counter).
-- Where a text is certainly a number, `+ 0` converts it: tonumber() parses it twice and costs half as much as a command.

-- The time in microseconds, as text.
local function micros(time) return time[1] .. string.sub('00000' .. time[2], -6) end

-- The counter, unless no clock will show its value within ten years, or it is not a number: such a value does not count
-- and the next token replaces it, so that a damaged key recovers.
local function counted(value, clock)  -- clock: the server's, in us
  local counter = tonumber(value)
  return counter and counter < clock + 315576000000000 and math.floor(counter) or 0
end

-- Draw this many tokens at a time (micros), one after the other; returns the first, and its text. It is above every
-- earlier one and not below `least`; also when the counter was lost, unless the clock went back as well. Mostly the
-- clock is ahead of the counter.
local function draw(text, least, count)
  local clock = text + 0
  local token = math.max(clock, least)
  if token > clock then text = string.format('%.0f', token) end
  local last = count == 1 and text or string.format('%.0f', token + count - 1)
  local before = redis.pcall('SET', tokens, last, 'GET')
  if not before then return token, text end
  local counter = counted(before, clock)
  if counter >= token or type(before) == 'table' then
    token = math.max(token, counter + 1)
    text = string.format('%.0f', token)
    redis.call('SET', tokens, string.format('%.0f', token + count - 1))
  end
  return token, text
end
