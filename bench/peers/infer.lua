-- The request of every peer: 64 floats as JSON. What is no 200 is counted and printed for compare.py.
local numbers = {}
for n = 0, 63 do numbers[#numbers + 1] = string.format("%.1f", n / 2) end
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,64],"data":[' .. table.concat(numbers, ",") .. ']}]}'

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format("RESULT %.1f %.3f %.3f %d\n", summary.requests / summary.duration * 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
