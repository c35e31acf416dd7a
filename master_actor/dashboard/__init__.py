"""The live page: what the master reports, in a browser.

`page` is what the master holds: it takes a port, says where the page is, and never raises. `serving` is the HTTP server
(aiohttp, which is imported only once a page is wanted), `feed` makes what the open pages are sent, `access` decides who
may look. `static/` is the page itself, hand-written; it loads nothing from elsewhere. Nothing here changes anything of
the master: the page only reads.
"""
