"""Drop-in replacements for modules of `ray.util`: `ray_pccl.util.collective`."""
