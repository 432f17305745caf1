/* What appears under its name only when it is whole is made under another name beside it, and renamed. */
#ifndef BARCHAN_TEMPORARY_H
#define BARCHAN_TEMPORARY_H
#include <stdbool.h>

#define TEMPORARY_MAX 32

/* A name that nobody has; false with errno. */
bool temporary_name(char name[TEMPORARY_MAX]);
/* A new file of such a name in `dir`, for writing; -1 with errno. */
int open_temporary(int dir, char name[TEMPORARY_MAX]);
#endif
