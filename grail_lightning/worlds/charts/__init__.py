"""Questions about charts, on which a tool draws."""
