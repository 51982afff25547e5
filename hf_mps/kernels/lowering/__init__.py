"""From a kernel's bitcode to machine code of this CPU: inlined, its lanes made a loop or coroutines, optimised."""
