"""The sides of a comparison as programs: each loads once, then answers JSON lines, one run at a time.

Those that could share our process have their own too: OpenMP keeps a team for every thread that ever computed, and with
more threads than cores libgomp lets all of them sleep between kernels, which costs every side a third. Those of other
environments run under another interpreter, and import neither fastdraft nor each other's libraries.
"""
