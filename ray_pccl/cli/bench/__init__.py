"""``ray-pccl bench``: all-reduce on the cluster as it is.

`command` is what people call, `running` drives actors that `worker` runs in, `values` knows what must come out,
`figures` makes times into a table, a file and a picture.
"""
