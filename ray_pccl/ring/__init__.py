"""The data plane: how tensors move between the members of an epoch, and how a result is committed.

`segment`, `bell`, `shared`: one host, through memory that each rank alone writes. `wire`, `link`, `mesh`, `programs`:
sockets, between hosts or where shared memory is not to be used. `plane` joins them for one communicator; `handover` is
for memory that changes hands as a whole. `kernels`, `tensors`, `quantization` know what the bytes mean. Nothing here
imports Ray, or decides who is a member.
"""
