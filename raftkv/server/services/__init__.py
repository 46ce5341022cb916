"""The gRPC services that need only the store and the loop."""
