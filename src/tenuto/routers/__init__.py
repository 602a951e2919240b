"""Routers: `tenuto` is Tenuto's own, `published` has those of other projects; a file by its name adds one."""
