"""Programs in plain JAX that `meshwright plan` knows by a name, as it plans anybody's: start with `resnet.make`."""
