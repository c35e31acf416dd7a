"""`ray-pccl launch`: a cluster from a file, up when it says so.

`document` reads a YAML file by its fields and lines; `validating` and `kuberay` find what is wrong in it, before
anything is started; `expecting` knows which nodes there are to be, and which are missing: all of these decide, and
touch nothing. `command` runs `ray up` and waits; `looking` runs on the cluster's head meanwhile, and tells what is
there. Ending a cluster is Ray's own `ray down`.
"""
