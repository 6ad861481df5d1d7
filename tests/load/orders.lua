-- Each request posts an order of its own; what was answered with 201 is written down, by thread, in FOLDER.
-- wrk does not say which request a response belongs to, so the service answers with the order's number.

local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("number", threads)
end

function init(args)
  taken = io.open(args[1] .. "/taken-" .. number, "w")
  taken:setvbuf("line")
  orders = number * 100000000
end

function request()
  orders = orders + 1
  return wrk.format("POST", "/orders/" .. orders)
end

function response(status, headers, body)
  if status == 201 then
    taken:write(body, "\n")
  end
end
