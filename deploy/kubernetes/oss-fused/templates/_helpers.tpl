{{- define "oss-fused.name" -}}
{{ printf "%s-%s" .release .model | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "oss-fused.labels" -}}
app.kubernetes.io/name: oss-fused
app.kubernetes.io/instance: {{ .release | quote }}
app.kubernetes.io/component: serving-engine
oss-fused/model: {{ .model | quote }}
{{- end }}

{{- define "oss-fused.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "oss-fused.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
