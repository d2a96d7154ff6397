"""What people run and look at: the command line, callbacks, views, reports, sweeps and plans."""
