"""The messages between the page and what answers it, as types. `docs/explore.md` is made from them."""
