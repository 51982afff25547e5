"""From a kernel's bitcode to machine code of this CPU: inlined, its lanes made loops, optimised."""
