-- Adds what a frontend has seen in some contexts to their sums, and tells the sums, in one step.
-- KEYS[1] has the number of the frontend's last batch: what is sent again is added once. The others are the contexts'.
-- ARGV: the batch's number, how long (ms) that number and (s) a context stays; then for each context its members, the
-- requests of a block, the requests to add, how many losses, and of each its block, its member, its sum and its count.
-- A context is a hash: r requests, and of each block B and member M the sum B:M and the count B:M:n.
local seen = redis.call('GET', KEYS[1])
local again = seen and tonumber(seen) and tonumber(seen) >= tonumber(ARGV[1])
if not again then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
local at, told = 4, {}
for i = 2, #KEYS do
  local key, wrong = KEYS[i], nil
  local function call(...)
    local reply = redis.pcall(...)
    if type(reply) == 'table' and reply.err then wrong = wrong or reply.err end
    return reply
  end
  local members, size, requests, losses = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  -- A context that has learned nothing is not stored.
  local counted = losses > 0 or redis.call('EXISTS', key) == 1
  if counted and not again then
    call('HINCRBY', key, 'r', requests)
    for loss = at, wrong and at - 1 or at + 4 * losses - 1, 4 do
      local cell = ARGV[loss] .. ':' .. ARGV[loss + 1]
      call('HINCRBYFLOAT', key, cell, ARGV[loss + 2])
      call('HINCRBY', key, cell .. ':n', ARGV[loss + 3])
    end
    call('EXPIRE', key, ARGV[3])
  end
  at = at + 4 * losses
  local r = tonumber(call('HGET', key, 'r') or 0) or 0
  local newest = math.floor(math.max(r - 1, 0) / size)
  local oldest = math.max(newest - 8, 0)
  local fields = {}
  for block = oldest, newest do
    for member = 0, members - 1 do
      local cell = string.format('%.0f:%d', block, member)
      fields[#fields + 1] = cell
      fields[#fields + 1] = cell .. ':n'
    end
  end
  local cells = call('HMGET', key, unpack(fields))
  local length = call('HLEN', key)
  if not wrong and length > 36 * members + 1 and length < 1000 * members then
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local block = tonumber(string.match(field, '^(%d+):'))
      if block and block < oldest then redis.call('HDEL', key, field) end
    end
  end
  if wrong then
    told[i - 1] = { 'wrong', wrong }
  else
    told[i - 1] = { counted and 1 or 0, string.format('%.0f', r), string.format('%.0f', oldest), cells }
  end
end
return told
