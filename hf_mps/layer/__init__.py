"""What `import torch` switches on: guards, integrations with libraries, compatibility, the fused step."""
