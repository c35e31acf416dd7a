"""What both ends of a control connection share.

`endpoint` (where a master is, and its key), `messages` (what is said), `frames` (how messages become bytes, with every
length checked before anything is allocated), `handshake` (both sides prove the key before a message is read).
No sockets, no threads, no Ray.
"""
