"""Engine plug-ins and the API that they share."""
