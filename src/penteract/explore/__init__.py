"""The explorer: a page of this machine that shows what the planner computes.

`answers` compute, `server` sends, `assets` draw; no number is computed or formatted outside of `answers`.
"""
