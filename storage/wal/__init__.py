"""Write-ahead log."""
