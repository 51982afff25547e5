"""`hf-mps plan`: will a training fit into a Mac's memory, as the trace of one step tells, which holds no tensor."""
