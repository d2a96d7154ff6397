"""What a training run will need, before any machine is rented: memory of each rank, and seconds of each phase.

No weights are loaded. Parameters are counted on torch's meta device, and the decoder blocks and the cache of keys and
values are run on tensors without data, which tells what they allocate. The rest is arithmetic.

==================  ================================================================================================
`settings`          The options of `fit` that matter here, in one record.
`shapes`            The model's config, its numbers of parameters, and the optimiser's state.
`rows`              The largest micro-batch that a config allows.
`live`              Counts the bytes of living tensors, with data or without.
`trace`             Decoder blocks and decoding on tensors without data.
`head`              Memory of the log-probabilities. Pure.
`memory`            Memory of each phase on each rank. Pure.
`seconds`           Seconds of each phase, from rates of the hardware. Pure.
`capacity`          Puts these together for one number of devices.
`advice`            Options that make a run fit.
`table`, `command`  What ``python -m grail_lightning.plan`` prints.
==================  ================================================================================================
"""
